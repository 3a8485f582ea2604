"""Small helpers that know nothing of training: text, files, imports, libraries."""
