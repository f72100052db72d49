"""The directory of the chunks that instances hold, and the followers that keep it up to date."""
