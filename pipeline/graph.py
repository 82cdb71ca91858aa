"""The DALI graph that decodes and resamples pictures, the same for its CPU and its GPU operators.

Encoded bytes and numbers go in, upright pictures of one size come out. What is fixed for all pictures of a graph is its
`Form`; everything else comes with each picture. Nothing is drawn at random in here.

The CPU decodes the window that is to be seen, with as many pixels around it as the filter reaches: of a picture that
may be decoded in part (`Form.part`) that window alone, of another one the whole, of which the same window is cut. Both
give the same pixels, and both are then resampled from the same stretch of that window. A GPU decodes the whole and
resamples from it.

Colour steps are the business of `headrace.pipeline.dali_colour`, which has three functions. What they get are the
upright pictures, mirrored and with their frame, uint8 HWC of the size of the output, so that boxes and kernels are in
the frame in which the steps are meant:

    form(steps: Sequence[Step]) -> Hashable             what of the steps is compiled into a graph: kinds, constants
    apply(images: DataNode, form, size) -> DataNode     called while a pipeline is defined; images may be on a GPU.
                                                        Brings its own `fn.external_source(name=...)`
    inputs(steps: Sequence[Step]) -> dict[str, NDArray] by those names, row i belongs to picture i of the batch
"""
