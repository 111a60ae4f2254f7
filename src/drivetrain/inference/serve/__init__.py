"""Serves a model over HTTP, with the requests and answers of OpenAI's API."""
