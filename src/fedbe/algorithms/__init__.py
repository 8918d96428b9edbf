"""Federated learning methods: what clients do, what the server does, and the catalogue of methods."""
