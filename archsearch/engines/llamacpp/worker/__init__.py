"""What runs in llama.cpp's own interpreter."""
