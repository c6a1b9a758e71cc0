"""The verl side of the server: workers, losses, rollout. It never sees HTTP."""
