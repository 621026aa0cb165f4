"""The one error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in what the user gave: the command line prints its one line and exits with status 2."""
