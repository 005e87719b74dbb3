"""The language every ObjectCache process speaks: values, codecs, arithmetic and errors. No sockets, files or clocks."""
