"""nanoplan: training LLM planning agents, in a codebase small enough to read in an afternoon."""
