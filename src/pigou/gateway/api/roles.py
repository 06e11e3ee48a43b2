"""Counts of workers that compute prompts, and of those that decode, at `/roles`."""

from __future__ import annotations

from aiohttp import web

from pigou.gateway.api.page import Access, APIPage, APIPages, json_response
from pigou.gateway.gateway import Gateway


def pages(gateway: Gateway) -> APIPages:
    """Return `/roles`, for an administrator."""

    async def roles(_: web.Request) -> web.Response:
        columns = [model.plane_driver.plane.state.columns for model in gateway.routing]
        prefill = sum(int(each.prefills.sum()) for each in columns)
        decode = sum(int(each.decodes.sum()) for each in columns)
        return json_response({"prefill": prefill, "decode": decode})

    return APIPages([APIPage("/roles", roles, access=Access.ADMIN)])
