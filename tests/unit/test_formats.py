from __future__ import annotations

import gzip

import pytest
from pictures import encode, noise

from headrace.pipeline.formats import DECODED, HEIF, sniff


@pytest.mark.parametrize("name", [n for n in DECODED if n != "PSD"])
def test_each_decoded_format_that_pillow_writes_is_told_by_its_content(name: str) -> None:
    assert sniff(encode(noise(16, 16), name)) == (name, name)


@pytest.mark.parametrize(
    "data, what",
    [
        (b"\xff\x0a" + bytes(20), "JPEG XL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isommp42", "MP4"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "EPS"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (gzip.compress(b"x", mtime=0), "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"/9j/4AAQSkZJRgABAQAAAQ", "base64"),
        (b"\xc3\xbf\xc3\x98\xc3\xbf", "converted to UTF-8"),
        (b"\x89PNG\n\x1a\n" + bytes(20), "converted as if they were text"),
        (b"just some text", "text: 'just some text'"),
        (bytes(100), "100 zero bytes"),
        (b"\x8b\x4a\xe5", "begins with 8b 4a e5"),
        (b"SIMPLE  =                    T", "FITS"),
    ],
)
def test_what_is_not_decoded_is_named(data: bytes, what: str) -> None:
    kind, description = sniff(data)
    assert kind is None
    assert what in description


@pytest.mark.parametrize("brand", [b"heic", b"mif1", b"heix"])
def test_heic_is_told_by_its_brand(brand: bytes) -> None:
    assert sniff(b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic") == (HEIF, "HEIC")


def test_an_avif_that_only_lists_its_brand_as_compatible_is_one() -> None:
    assert sniff(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf")[0] == "AVIF"


def test_formats_that_run_other_programs_or_read_anything_are_not_in_the_list() -> None:
    assert not {"EPS", "FITS", "WMF", "MPEG", "IM", "SPIDER", "PCD", "HDF5", "GRIB", "BUFR"} & set(DECODED)
