"""Models that can be asked for by name, as dims specifications (published configurations). Torch-free."""

SHIPPED: dict[str, str] = {
    "gpt2": "gpt:layers=12,hidden=768,heads=12,vocab=50257,seq=1024",
    "gpt2-medium": "gpt:layers=24,hidden=1024,heads=16,vocab=50257,seq=1024",
    "gpt2-large": "gpt:layers=36,hidden=1280,heads=20,vocab=50257,seq=1024",
    "gpt2-xl": "gpt:layers=48,hidden=1600,heads=25,vocab=50257,seq=1024",
    "gpt3-175b": "gpt:layers=96,hidden=12288,heads=96,vocab=50257,seq=2048",
    "llama-7b": "llama:layers=32,hidden=4096,heads=32,ffn=11008,vocab=32000,seq=2048",
    "llama-13b": "llama:layers=40,hidden=5120,heads=40,ffn=13824,vocab=32000,seq=2048",
    "llama2-7b": "llama:layers=32,hidden=4096,heads=32,ffn=11008,vocab=32000,seq=4096",
    "llama2-70b": "llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=32000,seq=4096",
    "llama3-8b": "llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=8192",
    "llama3-70b": "llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,seq=8192",
    "llama3-405b": "llama:layers=126,hidden=16384,heads=128,kv_heads=8,ffn=53248,vocab=128256,seq=8192",
    "mistral-7b": "llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000,seq=8192",
}
"""Name -> specification; `--seq-len` wins over `seq`."""
