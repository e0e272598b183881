"""The exact-match suite's inputs and references."""
