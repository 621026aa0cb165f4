"""Watch: what long work on a checkpoint tells whoever waits for it."""

import sys


class Watch:
    """Silent but for notes, which go to standard error. A progress display overrides the rest."""

    def total(self, steps: int) -> None:
        """So many steps there will be."""

    def advance(self) -> None:
        """One more step is done."""

    def note(self, text: str) -> None:
        """Something that was done otherwise than one might think."""
        print(f"note: {text}", file=sys.stderr)
