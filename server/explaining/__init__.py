"""``latentkv explain``: why a prompt matched no further, and how two prompts part."""
