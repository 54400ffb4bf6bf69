import collections
import functools

import keras
import numpy as np
import pytest
import sentencepiece

from keras_softmoe.datasets import sample, train_vocabulary


@functools.cache
def captions():
    return list(sample("icons").captions)


@functools.cache
def proto():
    return train_vocabulary(captions())


def test_special_pieces_are_those_of_t5():
    model = sentencepiece.SentencePieceProcessor(model_proto=proto())
    assert model.vocab_size() == 400
    assert (model.pad_id(), model.eos_id(), model.unk_id()) == (0, 1, 2)
    assert model.bos_id() == -1


def test_frequent_words_are_one_piece_and_no_caption_is_cut():
    model = sentencepiece.SentencePieceProcessor(model_proto=proto())
    words = collections.Counter(" ".join(captions()).split())
    frequent = [word for word, count in words.items() if count >= 10]
    assert len(frequent) > 10
    assert {w: len(ids) for w in frequent if len(ids := model.encode(w)) > 1} == {}
    # Other names than those that were learned from.
    others = sample("new_icons").captions.tolist()
    lengths = [len(ids) for ids in model.encode([*captions(), *others])]
    assert max(lengths) <= 16


def test_keras_hub_tokenizer_pads_with_zero():
    import keras_hub

    tokenizer = keras_hub.tokenizers.SentencePieceTokenizer(proto(), sequence_length=16)
    model = sentencepiece.SentencePieceProcessor(model_proto=proto())
    texts = [str(caption) for caption in captions()[:2000]]
    ids = keras.ops.convert_to_numpy(tokenizer(texts))
    expected = [(row + [0] * 16)[:16] for row in model.encode(texts)]
    np.testing.assert_array_equal(ids, expected)
    # Padding is at the end only: no piece of a text is 0.
    np.testing.assert_array_equal(np.sort(ids == 0, axis=1), ids == 0)


def test_any_english_text_can_be_encoded():
    model = sentencepiece.SentencePieceProcessor(model_proto=proto())
    text = 'A quick "Brown" fox, (jumping) over 1,234,567,890 lazy dogs - isn\'t it?!'
    assert model.unk_id() not in model.encode(text)
    assert model.decode(model.encode(text)) == text.lower()
    assert model.encode("A Red CIRCLE") == model.encode("a red circle")
    assert model.unk_id() in model.encode("круг")


def test_same_captions_give_the_same_bytes():
    assert train_vocabulary(np.array(captions())) == proto()
    assert train_vocabulary(tuple(captions()), 300) != proto()


@pytest.mark.parametrize("bad", ["a red circle", [], None, ["a", b"b"], [["a"]], 3])
def test_captions_must_be_texts(bad):
    with pytest.raises(ValueError, match="`captions` must be a list.* Received: "):
        train_vocabulary(bad)


@pytest.mark.parametrize("size, says", [(20, "smaller than"), (5000, "too high")])
def test_impossible_sizes(size, says, capfd):
    with pytest.raises(ValueError, match=f"{says}.*vocabulary_size={size}, "):
        train_vocabulary(captions(), size)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", [0, 300.0, "large"])
def test_size_must_be_a_whole_number(size):
    with pytest.raises(ValueError, match="Received: vocabulary_size="):
        train_vocabulary(captions(), size)
