// SPDX-License-Identifier: Apache-2.0
//
// Which conformance tests a device is known not to pass, and why: what holds for any verbs device
// is written in the tests, what does not is data here. main.cc leaves these tests out and prints
// the reasons. $VERBENA_TEST_DEVICES=rxe0,rxe1 names the two devices that the tests use (of one
// host, or one device twice); GID index 1 must lead from each to the other.
#pragma once

#include <string>
#include <string_view>

namespace verbena::testing {

struct Deviation {
  std::string_view device;  // how its name begins; with '!': all others
  std::string_view tests;   // patterns of --gtest_filter
  std::string_view reason;
};

inline constexpr Deviation kDeviations[] = {
    {"!verbena",
     "FaultyDevice.*:FaultyWire.*:Explained.*:ExtendedCqWithFaults.*:UnderFaults.*:Paths/Uc.*:"
     "ExtendedCq.StartingAPollFailsAsPollingDoes:AsyncEvents.ALink*:RetryError.*:*Migration*",
     "uses fault rules of the daemon"},
    {"!verbena", "Killed*:*/Killed*:Clients.*:Multicast.OtherProcesses*:Limits.*",
     "looks into the daemon or ends it"},
    {"!verbena", "Discovery.*:Nics/Device.*:OtherCalls.OffloadsOfSingleVendorsAreNotSupported",
     "expects the attributes that Verbena documents"},
    {"!verbena", "Shortage.*", "counts on what a creation needs of the process here"},
    {"rxe", "*Migration*", "has no alternate paths"},
    {"rxe", "*Xrc*:*/InvalidateMatrix.*/Xrc", "has no XRC"},
    {"rxe", "*RawPacket*:Rss.*", "has no raw packet QPs"},
    {"rxe", "Regions.MemoryOfTheDevice*:Regions.ImportedDeviceMemory*:Regions.ANullRegion*",
     "has neither device memory nor null regions"},
};

constexpr bool Concerns(const Deviation& deviation, std::string_view device) {
  const bool others = deviation.device.starts_with('!');
  return device.starts_with(deviation.device.substr(others ? 1 : 0)) != others;
}

// The device that tests call verbena0 or verbena1.
std::string DeviceUnderTest(const std::string& name);

}  // namespace verbena::testing
