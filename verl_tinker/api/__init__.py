"""HTTP only: routes, JSON and protobuf shapes, status codes. Holds no state and never sees Ray, torch or verl."""
