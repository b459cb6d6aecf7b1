"""What each command prints: text for a terminal of 100 columns, made from the data that `--json`
gives."""
