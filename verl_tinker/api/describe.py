"""The OpenAPI description at /openapi.json: what FastAPI knows of the routes, with the bodies that they read themselves.

Owns what is said of bodies and refusals. Does not read or check anything: `body` and `errors` do.
"""

from __future__ import annotations

import warnings
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from verl_tinker import __version__
from verl_tinker.api import wire
from verl_tinker.api.results import PROTOBUF

_SCHEMAS = "#/components/schemas/"
_REFUSAL = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string"}, "category": {"enum": ["user", "server"]}},
}
# Chooses its reader by the content type.
_FORWARD_BACKWARD = "/api/v1/forward_backward"


def install(app: FastAPI) -> None:
    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = describe


def _described(app: FastAPI) -> dict[str, Any]:
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    with warnings.catch_warnings():
        # A route with two methods has one operation id, and ids are left out below.
        warnings.simplefilter("ignore", UserWarning)
        schema = get_openapi(title=app.title, version=__version__, routes=routes)
    models = {route.path: model for route in routes if (model := _model(route))}
    wanted = [(model, "validation") for model in dict.fromkeys(models.values())]
    references, definitions = models_json_schema(wanted, ref_template=_SCHEMAS + "{model}")
    schema["components"] = {"schemas": {**definitions["$defs"], "Refusal": _REFUSAL}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            del operation["operationId"]
            operation["responses"].pop("422", None)
            refusals = operation["responses"].get("4XX") or _json("refused, and why", {"$ref": f"{_SCHEMAS}Refusal"})
            operation["responses"]["4XX"] = refusals
            if path in models and method != "get":
                operation["requestBody"] = _body(path, references[models[path], "validation"])
    return schema


def _model(route: APIRoute) -> type[BaseModel] | None:
    if route.path == _FORWARD_BACKWARD:
        return wire.JsonForwardBackward
    read = (getattr(part.call, "body_model", None) for part in route.dependant.dependencies)
    return next((model for model in read if model), None)


def _body(path: str, reference: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": reference}}
    if path == _FORWARD_BACKWARD:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": True, "content": content}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
