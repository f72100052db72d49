"""`python -m docs.generate`."""

from docs.generate.pages import main

main()
