#include <algorithm>

#include "config/config_json.hpp"
#include "config/quant_gru_pytorch.hpp"
#include "files.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {

const char *const kScaleKinds[2] = {"pot", "free"};
const char *const kActivations[3] = {"exact", "pwl", "quadratic"};
const char *const kGranularities[3] = {"tensor", "gate", "channel"};

namespace {

constexpr const char *kFusedName = "op.Rh_add_br";  // part of matmul.Rh; its settings are ignored

size_t distance(const std::string &a, const std::string &b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

std::string nearest(const std::string &name, const std::vector<std::string> &known) {
    const auto best = std::min_element(known.begin(), known.end(), [&](auto &a, auto &b) {
        return distance(name, a) < distance(name, b);
    });
    if (distance(name, *best) * 2 > name.size()) return "";
    return "; did you mean '" + *best + "'?";
}

// Reads one document and collects its problems.
class Reader {
 public:
    explicit Reader(const std::string &where) : where_(where) {}

    QuantConfig read(const Json &document) {
        QuantConfig config;
        const Json::Object *root = object(document, "the configuration");
        if (root) {
            known(*root, {"description", "comment", "GRU_config"}, "field", "");
            config.notes = notes(*root, "");
            const Json *gru = find(*root, "GRU_config");
            if (gru)
                read_gru(*gru, config);
            else
                problem("Expected GRU_config to be present, got nothing", "");
        }
        if (!problems_.empty()) throw FileError(problems_);
        return config;
    }

 private:
    void problem(const std::string &text, const std::string &place) {
        problems_ += (problems_.empty() ? "" : "\n") + text + " (" + place +
                     (place.empty() ? "" : ", ") + where_ + ")";
    }

    // Calls `read` and records its error.
    template <class Read>
    void attempt(const std::string &place, Read read) {
        try {
            read();
        } catch (const FileError &error) {
            problem(error.what(), place);
        }
    }

    const Json::Object *object(const Json &json, const std::string &name) {
        const Json::Object *found = nullptr;
        attempt("", [&] { found = &json.object(name); });
        return found;
    }

    static const Json *find(const Json::Object &members, const std::string &key) {
        for (const auto &member : members)
            if (member.first == key) return &member.second;
        return nullptr;
    }

    void known(const Json::Object &members, const std::vector<std::string> &names,
               const char *thing, const std::string &place) {
        for (const auto &member : members)
            if (std::find(names.begin(), names.end(), member.first) == names.end())
                problem("Expected a known " + std::string(thing) + ", got '" + member.first + "'" +
                            nearest(member.first, names),
                        place);
    }

    Notes notes(const Json::Object &members, const std::string &place) {
        Notes found;
        const auto read = [&](const char *key, std::optional<std::string> &to) {
            const Json *text = find(members, key);
            if (text && !text->is_null()) attempt(place, [&] { to = text->string(key); });
        };
        read("description", found.description);
        read("comment", found.comment);
        return found;
    }

    void flag(const Json::Object &members, const char *key, bool &to, const std::string &place) {
        if (const Json *json = find(members, key)) attempt(place, [&] { to = json->boolean(key); });
    }

    template <class Choice, size_t n>
    void choice(const Json::Object &members, const char *key, const char *const (&names)[n],
                Choice &to, const std::string &place) {
        const Json *json = find(members, key);
        if (!json) return;
        attempt(place, [&] {
            const std::string &text = json->string(key);
            const auto found = std::find(names, names + n, text);
            if (found == names + n) {
                std::string rule = "Expected " + std::string(key) + " to be one of";
                for (const char *name : names) rule += " '" + std::string(name) + "'";
                throw FileError(rule + ", got '" + text + "'");
            }
            to = static_cast<Choice>(found - names);
        });
    }

    void read_gru(const Json &json, QuantConfig &config) {
        const Json::Object *gru = object(json, "GRU_config");
        if (!gru) return;
        const std::string place = "section 'GRU_config'";
        known(*gru, {"description", "comment", "default_config", "operator_config"}, "field",
              place);
        config.gru_notes = notes(*gru, place);
        if (const Json *section = find(*gru, "default_config")) read_defaults(*section, config);
        if (const Json *section = find(*gru, "operator_config")) read_operators(*section, config);
    }

    void read_defaults(const Json &json, QuantConfig &config) {
        const Json::Object *section = object(json, "default_config");
        if (!section) return;
        const std::string place = "section 'default_config'";
        known(*section,
              {"description", "comment", "scale_kind", "activation", "segments", "correct_bias",
               "input_excludes_zero", "tie_x_and_h", "rounding", "rounding_input",
               "disable_quantization"},
              "field", place);
        config.default_notes = notes(*section, place);
        choice(*section, "scale_kind", kScaleKinds, config.scale_kind, place);
        choice(*section, "activation", kActivations, config.activation, place);
        flag(*section, "correct_bias", config.correct_bias, place);
        flag(*section, "input_excludes_zero", config.input_excludes_zero, place);
        flag(*section, "tie_x_and_h", config.tie_x_and_h, place);
        flag(*section, "disable_quantization", config.disable_quantization, place);
        choice(*section, "rounding", kRoundings, config.rounding, place);
        const Json *input = find(*section, "rounding_input");
        if (input && !input->is_null()) {
            Rounding rule = Rounding::half_even;
            choice(*section, "rounding_input", kRoundings, rule, place);
            if (rule == Rounding::twice)
                problem("Expected rounding_input to be another rule, got 'double'", place);
            config.rounding_input = rule;
        }
        const Json *segments = find(*section, "segments");
        if (segments && !segments->is_null())
            attempt(place, [&] {
                config.segments = static_cast<int>(segments->integer("segments", 1, 256));
            });
        if (config.activation == Activation::exact && config.segments)
            problem("Expected segments to be null with activation 'exact', got " +
                        std::to_string(config.segments),
                    place);
    }

    void read_operators(const Json &json, QuantConfig &config) {
        const Json::Object *section = object(json, "operator_config");
        if (!section) return;
        const std::string place = "section 'operator_config'";
        config.operator_notes = notes(*section, place);
        std::vector<std::string> names = {"description", "comment", "input.h", "weight.bx",
                                          kFusedName};
        for (int i = 0; i < kOperators; ++i) names.push_back(name_of(static_cast<Operator>(i)));
        known(*section, names, "operator", "");
        for (auto [old, full] :
             {std::pair("input.h", "output.h"), std::pair("weight.bx", "weight.bw")})
            if (find(*section, old) && find(*section, full))
                problem("Expected one of '" + std::string(old) + "' and '" + full +
                            "', which name the same operator, got both",
                        place);
        for (const auto &[name, entry] : *section) {
            if (name == "description" || name == "comment") continue;
            if (std::find(names.begin(), names.end(), name) == names.end()) continue;
            OperatorConfig ignored;
            const bool fused = name == kFusedName;
            const Operator op = fused ? Operator::Rh : operator_of(name);
            read_operator(entry, op, name, fused ? ignored : config[op]);
        }
    }

    void read_operator(const Json &json, Operator op, const std::string &name, OperatorConfig &to) {
        const Json::Object *entry = object(json, "settings of '" + name + "'");
        if (!entry) return;
        const std::string place = "operator '" + name + "'";
        known(*entry,
              {"description", "comment", "bitwidth", "is_symmetric", "is_unsigned", "granularity"},
              "field", place);
        to.notes = notes(*entry, place);
        if (const Json *bits = find(*entry, "bitwidth")) {
            if (bits->is_null() && is_fusible(op))
                to.bitwidth = 0;
            else
                attempt(place,
                        [&] { to.bitwidth = static_cast<int>(bits->integer("bitwidth", 1, 32)); });
        }
        flag(*entry, "is_symmetric", to.is_symmetric, place);
        flag(*entry, "is_unsigned", to.is_unsigned, place);
        const Json *granularity = find(*entry, "granularity");
        if (granularity && !granularity->is_null() && !is_weight(op))
            problem(
                "Expected granularity to be absent, because only weights and biases have a "
                "granularity",
                place);
        else if (granularity && !granularity->is_null())
            choice(*entry, "granularity", kGranularities, to.granularity, place);
        if (is_weight(op) && !to.is_symmetric)
            problem(
                "Expected is_symmetric to be true, because weights and biases are always "
                "symmetric, got false",
                place);
        if (is_weight(op) && to.is_unsigned)
            problem(
                "Expected is_unsigned to be false, because weights and biases are always "
                "signed, got true",
                place);
    }

    const std::string &where_;
    std::string problems_;
};

}  // namespace

QuantConfig read_config(const Json &document, const std::string &where) {
    return Reader(where).read(translated(document));
}

QuantConfig QuantConfig::from_text(const std::string &text, const std::string &where) {
    try {
        return read_config(Json::parse(checked_utf8(text)), where);
    } catch (const FileError &error) {
        const std::string said = error.what();
        if (said.find(where) != std::string::npos) throw;
        throw FileError(said + " (" + where + ")");
    }
}

QuantConfig QuantConfig::from_json(const std::string &path) {
    return from_text(read_file(path), "file '" + path + "'");
}

}  // namespace quant_gru
