"""Engines: the programs that complete prompts for a generator, behind one small interface.

`InferenceEngine` is the interface and `make_engine` makes one by its name. ``loom`` is Loom's own small engine, for
tests and demonstrations; ``vllm`` is a vLLM server, which Loom starts or which exists; ``sglang`` is an SGLang
server that exists; ``transformers`` generates in the generator's own process.
"""
