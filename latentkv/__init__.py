"""The ``latentkv`` command's own way in; the packages behind it are kvstore, server and mla."""
