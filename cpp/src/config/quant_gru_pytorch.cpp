#include "config/quant_gru_pytorch.hpp"

#include <map>

#include "quant_gru/config.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// In the order of `Operator`.
const char *const kNewer[kOperators] = {"input",
                                        "output",
                                        "weight_ih",
                                        "weight_hh",
                                        "bias_ih",
                                        "bias_hh",
                                        "linear.weight_ih_linear",
                                        "linear.weight_hh_linear",
                                        "gate.update_gate_input",
                                        "gate.update_gate_output",
                                        "gate.reset_gate_input",
                                        "gate.reset_gate_output",
                                        "gate.new_gate_input",
                                        "gate.new_gate_output",
                                        "op.mul_reset_hidden",
                                        "op.mul_old_contribution",
                                        "op.mul_new_contribution"};

std::string without_group(const std::string &name) { return name.substr(name.find('.') + 1); }

// Replaces the value of a key, if it is an object, by what `change` makes of its members.
template <class Change>
Json with(const Json &json, const char *key, Change change) {
    if (!json.is_object()) return json;
    Json::Object members = json.object("");
    for (auto &[name, value] : members)
        if (name == key && value.is_object()) value = change(value);
    return Json(std::move(members));
}

Json entry(const Json &given, const std::string &name) {
    if (!given.is_object() || !given.find("quantization_granularity")) return given;
    const std::string place = " (operator '" + name + "')";
    if (given.find("granularity"))
        throw FileError("Expected one of granularity and quantization_granularity, got both" +
                        place);
    static const std::map<std::string, std::string> granularities = {
        {"PER_TENSOR", "tensor"}, {"PER_GATE", "gate"}, {"PER_CHANNEL", "channel"}};
    Json::Object members = given.object("");
    for (auto &[key, value] : members) {
        if (key != "quantization_granularity") continue;
        const auto found =
            value.is_string() ? granularities.find(value.string("")) : granularities.end();
        if (found == granularities.end())
            throw FileError(
                "Expected quantization_granularity to be one of PER_TENSOR, PER_GATE, PER_CHANNEL, "
                "got " +
                (value.is_string() ? "'" + value.string("") + "'" : "another value") + place);
        key = "granularity";
        value = Json(found->second);
    }
    return Json(std::move(members));
}

Json operators(const Json &given) {
    Json::Object found;
    std::map<std::string, std::string> named;
    for (const auto &[name, value] : given.object("")) {
        const std::string newer = from_newer_name(name), ours = newer.empty() ? name : newer;
        const auto [known, is_new] = named.emplace(ours, name);
        if (!is_new)
            throw FileError("Expected one of '" + known->second + "' and '" + name +
                            "', which name the same operator, got both");
        found.emplace_back(ours, entry(value, name));
    }
    return Json(std::move(found));
}

Json defaults(const Json &given) {
    const Json *pot = given.find("use_pot2_scale");
    if (!pot) return given;
    const std::string kind = pot->boolean("use_pot2_scale") ? "pot" : "free";
    if (given.find("scale_kind"))
        throw FileError("Expected one of scale_kind and use_pot2_scale, got both");
    Json::Object members = given.object("");
    for (auto &member : members)
        if (member.first == "use_pot2_scale") member = {"scale_kind", Json(kind)};
    return Json(std::move(members));
}

}  // namespace

std::string from_newer_name(const std::string &name) {
    for (int i = 0; i < kOperators; ++i)
        if (name == kNewer[i] || name == without_group(kNewer[i]))
            return name_of(static_cast<Operator>(i));
    return "";
}

Json translated(const Json &document) {
    return with(document, "GRU_config", [](const Json &sections) {
        return with(with(sections, "operator_config", operators), "default_config", defaults);
    });
}

}  // namespace quant_gru
