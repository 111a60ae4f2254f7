"""Scripts that prepare a picture or a text as training did and ask a classifier's graph for its class.

They use nothing of this project: a picture is prepared by Pillow and NumPy, a text by its tokenizer, and the graph is
run by the format's own software.
"""

from __future__ import annotations

from typing import Any

from drivetrain.export.formats import IMAGES, TEXTS
from drivetrain.export.source import Source

PICTURE = """import json
import sys
import numpy as np
from PIL import Image, ImageOps
{library}

known = json.load(open("preprocessor_config.json"))
height, width = known["crop_size"]["height"], known["crop_size"]["width"]
picture = ImageOps.exif_transpose(Image.open(sys.argv[1])).convert("RGB")
if known["do_center_crop"] and picture.size != (width, height):
    scaled = [side * height // min(picture.size) for side in picture.size]  # the shorter side to height
    left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
    picture = picture.resize(scaled, Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
picture = picture.resize((width, height), Image.Resampling.BILINEAR).convert("RGB" if known["do_convert_rgb"] else "L")
pixels = np.asarray(picture, "float32").reshape(height, width, -1) / 255
pixels = (pixels - known["image_mean"]) / known["image_std"]
inputs = {"pixel_values": pixels.transpose(2, 0, 1)[None].astype("float32")}
"""
TEXT = """import json
import sys
from transformers import AutoTokenizer
{library}

tokenizer = AutoTokenizer.from_pretrained(".")
text = tokenizer(sys.argv[1], truncation=True, max_length={length}, return_tensors="np")
inputs = {{name: text[name] for name in json.load(open("example.json"))}}
"""
RUN = {
    "onnx": """[scores] = onnxruntime.InferenceSession("model.onnx").run(None, inputs)
""",
    "torch-export": """model = torch.export.load("model.pt2").module()
scores = model({name: torch.from_numpy(each) for name, each in inputs.items()}).detach().numpy()
""",
}
LIBRARIES = {"onnx": "import onnxruntime", "torch-export": "import torch"}
END = """names = json.load(open("config.json"))["id2label"]
print(json.dumps({"label": names[str(scores[0].argmax())], "scores": scores[0].tolist()}))
"""


def script_for(source: Source) -> str | None:
    """Returns the script for a classifier's graph; None for other models."""
    format_ = source.request.format
    if source.kind == IMAGES:
        prepare = PICTURE.replace("{library}", LIBRARIES[format_])
    elif source.kind == TEXTS:
        workload: Any = source.run.workload
        prepare = TEXT.format(library=LIBRARIES[format_], length=workload.data.max_length)
    else:
        return None
    return prepare + RUN[format_] + END
