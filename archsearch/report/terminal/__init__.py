"""What each command answers, as records whose fields `--json` shows, and as text for a terminal of
100 columns."""
