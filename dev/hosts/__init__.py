"""Batches on other CPUs: variables take instruction sets from the libraries of a fresh process."""
