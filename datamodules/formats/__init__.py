"""How tables, texts, pictures and files of other tools are read."""
