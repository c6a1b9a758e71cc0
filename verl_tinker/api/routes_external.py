"""Routes of weights on their way out: exports, signed links, archives, copies.

Owns the addresses that links lead to. Does not sign or read files: the core does.
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.responses import MalformedRangeHeader, RangeNotSatisfiable

from verl_tinker.api import wire_catalog
from verl_tinker.api.auth import CallerDep, reader_of
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.routes_catalog import CHECKPOINT, PathDep
from verl_tinker.core.checkpoints import parse_path
from verl_tinker.core.downloads import Link

router = APIRouter(dependencies=[Depends(require_ready)])
# A link is its own key, and files can be fetched while the engine starts.
open_router = APIRouter()


class _File(FileResponse):
    """Starlette's, whose refusals of a Range header would be plain text."""

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        remedy = f"ask for bytes=FIRST-LAST within the {file_size} bytes of the file, or leave the header out"
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            raise HTTPException(400, f"Range: {http_range[:100]!r} cannot be read; {remedy}") from None
        except RangeNotSatisfiable:
            size = {"Content-Range": f"bytes */{file_size}"}
            raise HTTPException(416, f"Range: {http_range[:100]!r} begins after the end; {remedy}", size) from None


async def read_link(expires: int, signature: Annotated[str, Query(max_length=128)]) -> Link:
    return Link(expires, signature)


LinkDep = Annotated[Link, Depends(read_link)]


@router.post("/save_weights_external")
async def save_weights_external(
    service: ServiceDep, caller: CallerDep, body: wire_catalog.SaveExternal = json_body(wire_catalog.SaveExternal)
) -> dict:
    future = service.saving.save_external(
        caller, body.model_id, body.seq_id, body.path, body.ttl_seconds, body.age_encryption_recipients or []
    )
    return {"request_id": future.request_id, "model_id": future.model_id}


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(request: Request, path: PathDep, service: ServiceDep, caller: CallerDep) -> dict:
    checkpoint = await service.catalog.checkpoint(caller, path)
    links = await service.downloads.file_links(checkpoint)
    urls = {name: _address(request, path, f"files/{quote(name)}", link) for name, link in links.items()}
    if not links:
        raise HTTPException(404, f"{path} has no files any more; delete it and save again")
    expires = next(iter(links.values())).expires
    return {"urls": urls, "expires": wire_catalog.date(expires)}


@router.get(CHECKPOINT + "/archive")
async def archive(request: Request, path: PathDep, service: ServiceDep, caller: CallerDep) -> Response:
    """SDKs up to 0.35 read the address and its end from the redirect and fetch it themselves."""
    link = service.downloads.archive_link(await service.catalog.checkpoint(caller, path))
    expires = format_datetime(datetime.fromtimestamp(link.expires, UTC), usegmt=True)
    headers = {"Location": _address(request, path, "archive.tar", link), "Expires": expires}
    return Response(status_code=302, headers=headers)


@open_router.api_route("/downloads/{run_id}/{kind}/{name}/files/{file:path}", methods=["GET", "HEAD"])
async def download_file(path: PathDep, file: str, service: ServiceDep, link: LinkDep) -> Response:
    found = await service.downloads.file(parse_path(path), file, link)
    return _File(found, media_type="application/octet-stream")


@open_router.get("/downloads/{run_id}/{kind}/{name}/archive.tar")
async def download_archive(path: PathDep, service: ServiceDep, link: LinkDep) -> Response:
    tar = await service.downloads.archive(parse_path(path), link)
    headers = {"Content-Length": str(tar.size_bytes)}
    return StreamingResponse(tar.parts(), media_type="application/x-tar", headers=headers)


@router.post("/copy_weights")
async def copy_weights(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    body: wire_catalog.CopyWeights = json_body(wire_catalog.CopyWeights),
) -> dict:
    reader = reader_of(request, caller, request.headers.get("x-tinker-weights-access-token"))
    source = await service.catalog.checkpoint(reader, body.source_path)
    run_id, project_id = None, body.destination_project_id
    if body.session_id is not None:
        if body.model_seq_id is None:
            raise HTTPException(422, "model_seq_id is missing; give it beside session_id, or destination_project_id")
        session = service.sessions.open(body.session_id, caller)
        run_id, project_id = f"{session.session_id}:train:{body.model_seq_id}", session.facts.project_id
    key = request.headers.get("x-idempotency-key")
    path = await service.copying.copy(source, caller or "", run_id, project_id, body.ttl_seconds, key)
    return {"tinker_path": str(path)}


def _address(request: Request, path: str, rest: str, link: Link) -> str:
    where = path.removeprefix("tinker://")
    return f"{request.base_url}api/v1/downloads/{where}/{rest}?expires={link.expires}&signature={link.signature}"
