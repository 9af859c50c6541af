"""Tool-call dialects: each model family's own way to write a call."""

from .registry import DIALECTS, DialectChoice, choose_dialect, dialect_named

__all__ = ["DIALECTS", "DialectChoice", "choose_dialect", "dialect_named"]
