"""Medical images with two classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedstrata.core.options import param
from fedstrata.data import formats
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import Directory, Progress, locate
from fedstrata.data.sets.common import build, data_set, scale

VALIDATION = param(False, "add the validation rows to the training rows")


@data_set
def pneumoniamnist(data_dir: Directory = None, progress: Progress = None, validation: bool = VALIDATION) -> Dataset:
    """Load PneumoniaMNIST, chest X-rays, 28 x 28 grey pixels in [-1, 1]: 4,708 training and 624 test rows.

    Class 1 is pneumonia, the more frequent class (74 % of the training rows).

    validation: add the 524 validation rows to the training rows.

    Yang et al., "MedMNIST v2", Scientific Data 2023; CC BY 4.0.
    """
    return _medmnist_set("pneumoniamnist", locate("pneumoniamnist.npz", data_dir, progress), 1, validation)


@data_set
def breastmnist(data_dir: Directory = None, progress: Progress = None, validation: bool = VALIDATION) -> Dataset:
    """Load BreastMNIST, breast ultrasound, 28 x 28 grey pixels in [-1, 1]: 546 training and 156 test rows.

    Class 1 is malignant (27 %); the file itself numbers the classes the other way round.

    validation: add the 78 validation rows to the training rows.

    Yang et al., "MedMNIST v2", Scientific Data 2023; CC BY 4.0.
    """
    return _medmnist_set("breastmnist", locate("breastmnist.npz", data_dir, progress), 0, validation)


@data_set
def ham10000(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load HAM10000, photographs of skin lesions, 3 x 28 x 28 pixels in [-1, 1]: 4,786 training and 1,198 test rows.

    The task is to recognise melanoma: class 1 (8.2 %) is melanoma, class 0 any other lesion. There is one photograph
    per lesion, so no lesion is in both parts. The file ``ham10000.npz`` has no official address: put it into the data
    directory yourself. It holds ``images`` [n, 28, 28, 3] (uint8), ``melanoma`` [n] (1 for melanoma) and ``is_test``
    [n] (True for test rows).

    Tschandl et al., "The HAM10000 dataset, a large collection of multi-source dermatoscopic images of common pigmented
    skin lesions", Scientific Data 2018; CC BY-NC 4.0, so not for commercial use.
    """
    path = locate("ham10000.npz", data_dir, progress)
    images, targets, is_test = formats.npz(path, "images", "melanoma", "is_test").values()
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise formats.unreadable(
            path, f"images has {images.dtype} of shape {images.shape}, not uint8 [n, height, width, 3]"
        )
    pixels, test = scale(images.transpose(0, 3, 1, 2), 0.5, 0.5), is_test.astype(bool)
    return build("ham10000", pixels[~test], targets[~test], pixels[test], targets[test], 2)


def _medmnist_set(name: str, path: Path, positive: int, validation: bool) -> Dataset:
    parts = [formats.medmnist(path, part) for part in ("train", "val")[: 2 if validation else 1]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    test_images, test_labels = formats.medmnist(path, "test")
    pixels, test_pixels = (scale(array[:, None], 0.5, 0.5) for array in (images, test_images))
    return build(name, pixels, labels == positive, test_pixels, test_labels == positive, 2)
