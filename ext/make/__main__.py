"""Compiles from a command line: `python ext/make WHAT ...`, with the Python of the virtual environment or any other.

`compile FLAGS... -c SOURCE -o OBJECT` compiles with $CXX through the cache, in the current folder, and writes the rule
that make includes into OBJECT's name with .d. `program SOURCE TARGET` links a program from one source and the core
library; both are paths relative to the tree.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make import native
from make.build import Builder, BuildFailed, common_of, compile_step


def compile_for_make(words: list[str]) -> None:
    product = words[words.index("-o") + 1]
    source = words[words.index("-c") + 1]
    flags = [word for word in words if word not in ("-c", "-o", product, source)]
    builder = Builder(links=False)
    common = common_of("ext/make/common.h", flags)
    names = builder.make(compile_step(source, product, flags, Path.cwd(), common))
    escaped = [name.replace(" ", "\\ ") for name in names]
    # An empty rule for each header, so that make does not fail when a header was deleted.
    rules = "".join(f"{name}:\n" for name in escaped[1:])
    Path(product).with_suffix(".d").write_text(f"{product}: {' '.join(escaped)}\n{rules}")
    if builder.ran:
        builder.sweep()


def link(source: str, target: str) -> None:
    builder = Builder()
    with native.exclusive_build(), ThreadPoolExecutor(max_workers=native.jobs_wanted()) as pool:
        core = native.make_core(builder, pool)
        step = compile_step(source, native.object_of(source), [*native.own_flags(), "-Iext/core/tests"])
        builder.make(step)
        builder.make(native.link_step([step.product, core], target))


def main(what: str = "", *words: str) -> int:
    try:
        if what == "compile" and "-c" in words and "-o" in words:
            compile_for_make(list(words))
        elif what == "program" and len(words) == 2:
            link(*words)
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
