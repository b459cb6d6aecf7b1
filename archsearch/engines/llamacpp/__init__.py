"""llama.cpp, through its own HTTP server."""
