"""`rtx analyze pretrained`: the loss and the attention that selections cost a pretrained model.

In the model as it is, every query reads all keys up to its position: it is *dense*. The analysis
replaces its attention by each of several choices in turn. With a choice a query reads the keys of a
*window* that ends with it, the *sinks* (the first keys), and some of the *far* keys, those in
between. The *selection* of the choice is the rule that chooses them. Loss is measured in bits per
token, over windows of text.

`texts` cuts a text into windows, `cost` counts memory and time, `compare` measures a window,
`measure` measures all of them and makes the record.
"""
