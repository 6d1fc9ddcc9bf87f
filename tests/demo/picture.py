"""The labelled side-by-side picture."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SCALE = 2
MARGIN = 14
LABEL_HEIGHT = 44


def side_by_side(rows: list[list[tuple[str, Path]]], target: Path) -> Path:
    """Write one picture with a row for each prompt and a labelled cell for each path, and return its place.

    Args:
        rows: for each prompt its (label, picture file) cells; a label may hold a line break.
    """
    with Image.open(rows[0][0][1]) as first:
        width, height = first.width * SCALE, first.height * SCALE
    columns = max(len(cells) for cells in rows)
    row_height = height + LABEL_HEIGHT + 2 * MARGIN
    sheet = Image.new("RGB", (MARGIN + columns * (width + MARGIN), len(rows) * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=15)
    for row, cells in enumerate(rows):
        for column, (label, file) in enumerate(cells):
            left, top = MARGIN + column * (width + MARGIN), MARGIN + row * row_height
            draw.multiline_text((left, top), label, fill="black", font=font, spacing=4)
            with Image.open(file) as picture:
                cell = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(cell, (left, top + LABEL_HEIGHT))
            draw.rectangle(
                (left - 1, top + LABEL_HEIGHT - 1, left + width, top + LABEL_HEIGHT + height), outline="#bbb"
            )
    sheet.save(target)
    return target
