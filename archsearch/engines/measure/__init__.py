"""What is measured in an engine: by prompt, under load, its passes, its overhead."""
