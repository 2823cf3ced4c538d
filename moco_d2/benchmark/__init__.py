"""How fast the parts of this project are, each beside the usual way, in the same run."""
