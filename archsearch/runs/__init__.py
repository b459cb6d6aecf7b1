"""The run folder: every file of a run has one type, written and read here."""
