"""Pictures of what goes in, how training went, and what comes out."""
