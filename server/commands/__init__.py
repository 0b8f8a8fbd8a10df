"""The commands of ``latentkv``, a module for each noun."""
