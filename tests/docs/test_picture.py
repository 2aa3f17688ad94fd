"""The picture of the README shows what the page says."""

from __future__ import annotations

import picture


def test_the_picture_is_that_of_the_page() -> None:
    drawn = picture.picture()
    assert picture.PICTURE.read_text(encoding="utf-8") == drawn
    last = picture.answer().splitlines()[-1].split()[0]
    assert last in drawn
    assert "url(http" not in drawn, "a picture from elsewhere would need the network"
