"""vLLM: in a process of its own, or as a server that runs already."""
