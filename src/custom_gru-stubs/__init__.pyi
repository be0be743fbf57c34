from quant_gru import CustomGRU as CustomGRU
