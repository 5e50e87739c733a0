"""/v1/models: the one model under each of its names."""

import asyncio

from tests.server.conftest import serving


def test_each_name_has_a_card():
    async def check():
        async with serving(served_model_names=["first", "org/second"]) as http:
            cards = (await http.get("/v1/models")).json()
            assert cards["object"] == "list"
            assert [card["id"] for card in cards["data"]] == ["first", "org/second"]
            for card in cards["data"]:
                assert card["object"] == "model"
                assert card["owned_by"] == "jaxserve"
                assert card["root"] == "first"
                assert card["parent"] is None
                assert card["max_model_len"] == 512
                assert isinstance(card["created"], int)
            assert (await http.get("/v1/models/org/second")).json() == cards["data"][1]

    asyncio.run(check())


def test_an_unknown_name_is_404_in_openais_shape():
    async def check():
        async with serving() as http:
            assert (await http.get("/v1/models/fake")).status_code == 200
            reply = await http.get("/v1/models/other")
            assert reply.status_code == 404
            error = reply.json()["error"]
            assert error["code"] == "model_not_found"
            assert error["param"] == "model"
            assert "'other'" in error["message"]

    asyncio.run(check())
