"""A real use: handwritten digits of scikit-learn classified by kernel regression, with attention as the smoother.

The weights of a Gaussian kernel, exp(-gamma |x - y|^2), are those of a softmax over training images y of
gamma (2 x.y - |y|^2): q = x, k = y, ``scale = 2 gamma``, ``bias = -gamma |y|^2``, and v is one column per class.
"""

import numpy as np
import pytest

import cuflash

GAMMA = 2.0
TRAINING = 1000


@pytest.fixture(scope="module")
def digits():
    """Training and test images with pixels between 0 and 1, and their classes as ones and zeros."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, classes = images[order] / 16, np.eye(10)[labels[order]]
    return images[:TRAINING], classes[:TRAINING], images[TRAINING:], classes[TRAINING:]


def smooth(x, y, classes, **options):
    """Estimated probability of every class for the images x, from images y of known class."""
    bias = -GAMMA * (y.astype(np.float64) ** 2).sum(axis=1)
    bias_dtype = np.float64 if x.dtype == np.float64 else np.float32
    return cuflash.attention(x, y, classes, scale=2 * GAMMA, bias=bias.astype(bias_dtype), **options)


def brute_force(x, y, classes):
    """The same by distances, nothing rearranged."""
    weights = np.exp(-GAMMA * ((x[:, None] - y[None]) ** 2).sum(axis=-1))
    return weights @ classes / weights.sum(axis=1, keepdims=True)


def accuracy(probabilities, classes):
    return np.mean(probabilities.argmax(axis=1) == classes.argmax(axis=1))


def test_digits_are_classified(digits):
    y, y_classes, x, x_classes = digits
    probabilities = smooth(x, y, y_classes)
    expected = brute_force(x, y, y_classes)
    np.testing.assert_allclose(probabilities, expected, atol=1e-10)
    assert len(x) == 797
    assert accuracy(probabilities, x_classes) == accuracy(expected, x_classes)
    assert round(accuracy(probabilities, x_classes), 3) == 0.986


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 0.01)])
def test_in_lower_precision(digits, dtype, tolerance):
    y, y_classes, x, x_classes = (part.astype(dtype) for part in digits)
    probabilities = smooth(x, y, y_classes)
    assert probabilities.dtype == dtype
    expected = brute_force(*(part.astype(np.float64) for part in (x, y, y_classes)))
    np.testing.assert_allclose(probabilities, expected, atol=tolerance)
    assert accuracy(probabilities, x_classes) >= 0.98


def test_leaving_one_out_is_a_mask(digits):
    y, y_classes, *_ = digits
    others = ~np.eye(len(y), dtype=bool)
    probabilities = smooth(y, y, y_classes, mask=others)
    assert accuracy(smooth(y, y, y_classes), y_classes) == 1  # an image that may attend to itself knows
    assert accuracy(probabilities, y_classes) >= 0.98
    weights = np.exp(-GAMMA * ((y[:50, None] - y[None]) ** 2).sum(axis=-1)) * others[:50]
    expected = weights @ y_classes / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities[:50], expected, atol=1e-10)


def test_the_width_of_the_kernel_is_learned_by_its_gradient(digits):
    """d loss / d gamma from the gradient of q, against a difference quotient: the backward pass in use."""
    y, y_classes, x, x_classes = digits

    def loss_and_slope(gamma):
        # With q = gamma x and one more column for -gamma |y|^2, the loss depends on gamma through q alone.
        keys = np.concatenate([2 * y, -(y**2).sum(axis=1, keepdims=True)], axis=1)
        direction = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        attention = cuflash.FlashAttention(scale=1.0)
        out, lse = attention.forward(gamma * direction, keys, y_classes)
        error = out - x_classes
        dq = attention.backward(2 * error, gamma * direction, keys, y_classes, out, lse).dq
        return (error**2).sum(), (dq * direction).sum()

    step = 1e-4
    slope = loss_and_slope(GAMMA)[1]
    difference = (loss_and_slope(GAMMA + step)[0] - loss_and_slope(GAMMA - step)[0]) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-6)
