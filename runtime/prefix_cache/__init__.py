"""The prefix cache: what decides which KV can be reused for a wanted run. It never sees llama.cpp."""
