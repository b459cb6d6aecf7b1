"""A draft as a folder that engines load: transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp, and
archsearch itself."""
