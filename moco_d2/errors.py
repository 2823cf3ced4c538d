"""The error of everything that a user can put right."""


class UserError(ValueError):
    """Says in a sentence what is wrong, with the value, and what to do.

    Command lines show the sentence alone; any other exception keeps its stack trace.
    """
