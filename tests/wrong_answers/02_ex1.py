# expect: should be 256
def busiest(rows, tiles, splits, sms):
    return math.ceil(rows * tiles / sms)
