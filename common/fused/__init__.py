"""Decode steps of Llama-like models in five Triton kernels a layer; docs/decoding.md explains them."""
