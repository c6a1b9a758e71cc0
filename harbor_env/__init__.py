"""Harbor tasks in ROCK sandboxes as episodes that train a model behind the Tinker API.

Runs in the client's environment (tinker SDK and cookbook) and starts the server by its command line; imports nothing of it.
"""
