#pragma once

namespace mha::detail {

/// The operations of protocol 2 that are read, by the bytes that stand for them.
enum class PickleOp : unsigned char {
  kMark = '(',
  kStop = '.',
  kNone = 'N',
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kBinFloat = 'G',
  kBinUnicode = 'X',
  kBinString = 'T',       // of Python 2
  kShortBinString = 'U',  // of Python 2
  kEmptyTuple = ')',
  kTuple = 't',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kGlobal = 'c',
  kReduce = 'R',
  kNewObj = 0x81,
  kBuild = 'b',
  kPop = '0',
  kPopMark = '1',
  kBinPersId = 'Q',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kProto = 0x80,
};

}  // namespace mha::detail
