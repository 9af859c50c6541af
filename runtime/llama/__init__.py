"""llama.cpp in this process: the only package that imports llama_cpp, at the first call and not at import."""

from .engine import LlamaEngine
from .loading import Vocabulary, open_vocabulary
from .placement import Placement

__all__ = ["LlamaEngine", "Placement", "Vocabulary", "open_vocabulary"]
