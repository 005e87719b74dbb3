"""The decisions of SGLang's back-end. Pure: no clock, no network, no SGLang."""
