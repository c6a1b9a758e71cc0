"""Order, identity, versions and futures in pure Python: no HTTP, no Ray, no torch, no verl."""
